"""The display of `kedge top`, without the reading of the stream."""
