"""Tools: what reads or tries the core, or the files of other libraries. The core imports none of them."""
