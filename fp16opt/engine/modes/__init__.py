"""What a step meets only where an argument of the wrapper asks for it."""
