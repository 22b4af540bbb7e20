"""Proves that `minserve eval arithmetic` is a sharp gate: the accuracy and drift of the embedded model under each fault.

`python -m tools.fault_table` prints the table (minutes on a CPU); `--write` also puts it into docs/embedded-model.md. Ends with
1 when a fault would pass the gate.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import torch

from minserve.clients.arithmetic_reference import Item, PromptTokens, Reference, load_reference
from minserve.config import EMBEDDED_DIRECTORY
from tools.answer_steps import AnswerSteps, PromptAndAnswer, load_server_model
from tools.server_faults import ServerFault, server_faults

PAGE = Path(__file__).parent.parent / "docs" / "embedded-model.md"
BEGIN, END = "<!-- fault table -->", "<!-- end of fault table -->"


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One line of the table; drifts are signed, in nats."""

    name: str
    accuracy: float
    answer_drift: float
    prompt_drift: float

    def seen(self, reference: Reference) -> bool:
        """Whether the gate shuts: NaN shuts it too."""
        answers, prompts = abs(self.answer_drift) <= reference.answer_bound, abs(self.prompt_drift) <= reference.prompt_bound
        return not (answers and prompts)

    def markdown(self, reference: Reference) -> str:
        verdict = "seen" if self.seen(reference) else "within bounds"
        return f"| {self.name} | {self.accuracy:.3f} | {self.answer_drift:+.4f} | {self.prompt_drift:+.4f} | {verdict} |"


class Bench:
    """The items as tokens, and a fresh model for each line."""

    def __init__(self, directory: Path, items: list[Item]) -> None:
        self._directory = directory
        self._items = items
        tokens = PromptTokens(directory)
        self._pairs: list[PromptAndAnswer] = [tokens.of(item) for item in items]

    def line(self, name: str, fault: ServerFault | None = None, dtype: torch.dtype = torch.float32) -> Line:
        steps = AnswerSteps(load_server_model(self._directory, dtype), self._pairs)
        if fault is None:
            values = steps.run()
        elif fault.decode_only:
            values = steps.run(before_decode=lambda: fault.apply(steps))
        else:
            fault.apply(steps)
            values = steps.run()
        count, positions = len(self._items), sum(len(prompt) - 1 for prompt, _ in self._pairs)
        expected_answers = sum(sum(item.log_probabilities) for item in self._items)
        expected_prompts = sum(item.prompt_log_probability for item in self._items)
        return Line(
            name,
            sum(values.exact) / count,
            (sum(values.answer) - expected_answers) / count,
            (sum(values.prompt) - expected_prompts) / positions,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=80, help="only the first questions, all kinds alike")
    parser.add_argument("--write", action="store_true", help="put the table into docs/embedded-model.md")
    args = parser.parse_args()
    reference = load_reference()
    bench = Bench(EMBEDDED_DIRECTORY, reference.items[: args.limit])
    head = ["| what runs | accuracy | answer drift | prompt drift | the gate |", "|---|---|---|---|---|"]
    sound = [bench.line("**float32, no fault**"), bench.line("**bfloat16, no fault**", dtype=torch.bfloat16)]
    wrong = [f"{line.name} is outside its bounds" for line in sound if line.seen(reference)]
    rows = head + [line.markdown(reference) for line in sound]
    sys.stdout.write("\n".join(rows) + "\n")
    sys.stdout.flush()
    experts = load_server_model(EMBEDDED_DIRECTORY).config.moe
    assert experts is not None
    for fault in server_faults(range(experts.num_experts)):
        line = bench.line(fault.name, fault)
        if fault.collapse and line.accuracy > 0.5:
            wrong.append(f"{fault.name} leaves {line.accuracy:.3f} of the answers right")
        if not line.seen(reference):
            wrong.append(f"{fault.name} is within the bounds")
        rows.append(line.markdown(reference))
        sys.stdout.write(rows[-1] + "\n")
        sys.stdout.flush()
    if args.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text("\n".join([before + BEGIN, *rows, END]) + after, encoding="utf-8")
    sys.stdout.writelines(f"{sentence}\n" for sentence in wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    torch.set_num_threads(2)
    sys.exit(main())
