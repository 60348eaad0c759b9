"""Structures and variants of this process, and what the store on disk has of them."""
