"""OpenAI's Responses and Conversations: whole, streamed, stored, in the background and over a WebSocket."""
