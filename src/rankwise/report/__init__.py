"""Run directories -> terminal and HTML. No torch here."""
