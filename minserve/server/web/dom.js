// Makes DOM nodes; text is always text, never markup.

export const byId = (id) => document.getElementById(id);

/** An element with attributes (true: there without value; false, null: absent) and children, nodes or text. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false && value !== null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** A table from a caption (for those who hear it), column titles, and rows of text or nodes; a row's first cell names it. */
export function table(caption, titles, rows, className = "") {
  const head = element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)));
  const body = rows.map(([first, ...rest]) =>
    element("tr", {}, element("th", { scope: "row" }, first), ...rest.map((cell) => element("td", {}, cell))));
  return element("table", { class: className },
    element("caption", { class: "unseen" }, caption), element("thead", {}, head), element("tbody", {}, ...body));
}
