"""The client's side of the OpenAI protocol, shared by the commands. Imports neither torch nor Ray."""
