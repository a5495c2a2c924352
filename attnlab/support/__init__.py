"""What several floors need: errors, files, names, timing; it imports nothing else of attnlab."""
