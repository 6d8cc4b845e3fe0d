"""One replica's inference engine: what runs in a step, and the model that computes it. No Ray, no HTTP."""
