"""`python -m sonata_aot.aot` is `sonata-aot`."""

from .cli import main

main()
