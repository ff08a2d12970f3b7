"""The engine's components, in the order in which a gradient walks through them; ``fp16opt.optimizer`` composes them."""
