"""Who proposes tokens for the model to verify, and how many pay off."""
