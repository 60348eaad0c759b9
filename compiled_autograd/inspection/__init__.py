"""The tape for people: read once without running it, then listed, drawn and added up. Nothing live is kept."""
