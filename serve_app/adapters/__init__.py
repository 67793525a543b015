"""LoRA adapters as clients see them: names, the routes that change them, and their places in the engines."""
