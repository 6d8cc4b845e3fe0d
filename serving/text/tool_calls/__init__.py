"""Function calls in the text that models write: the formats, how they are read, and how they are enforced."""
