"""The report of a session or of the store: one HTML file that opens from disk.

``data.py`` has the records of a page, ``page.py`` writes the page, ``from_store.py`` fills the records from the store.
``compiled_autograd/report/`` fills them from a session. Nothing here imports torch.
"""
