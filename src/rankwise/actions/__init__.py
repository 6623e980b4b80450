"""What runs after each optimizer step."""
