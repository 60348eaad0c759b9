"""Programs to read and to run. A package, so that no other distribution's folder of this name is found before it."""
