"""The trainers that people use: one file each, which imports its framework. Importing fp16opt imports none of them."""
