"""Callbacks for the trainers of other libraries. Each module needs the library that it is named after."""
