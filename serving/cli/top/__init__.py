"""What `kedge top` shows, apart from where it comes from."""
