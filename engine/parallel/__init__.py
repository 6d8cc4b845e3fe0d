"""Tensor parallel: the processes that hold one model together, their collectives and their messages."""
