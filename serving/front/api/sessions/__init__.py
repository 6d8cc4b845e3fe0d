"""SGLang's session API, and Kedge's own calls on sessions."""
