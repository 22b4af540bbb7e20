"""`python -m minserve`: the same as the `minserve` script."""

from minserve.cli import main

main()
