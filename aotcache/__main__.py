"""`python -m aotcache`: the command line of the environment that this Python belongs to."""

from aotcache.cli import main

main()
