"""Shows run directories, and the rank of a process, as text. No torch here."""
