"""The protocols, a folder each, and beside these what they share. They know no Ray, of the engine only its api.py."""
