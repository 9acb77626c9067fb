"""`python -m selfvitmil`."""

from selfvitmil.cli import main

main()
