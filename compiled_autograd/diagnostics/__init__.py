"""Why a backward was no hit, in the user's terms; and how it is told."""
