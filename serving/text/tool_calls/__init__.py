"""Function calls in the text that models write: how each format looks, how it is read, and how it is held to."""
