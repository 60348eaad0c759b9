"""Callbacks for trainers of others; each file needs the library that it is named after."""
