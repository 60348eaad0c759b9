"""The report: one HTML file that opens from disk, of a session or of the store.

``data.py`` is what a page shows, ``page.py`` makes the page, ``from_store.py`` takes it from the store's records. What
a session adds comes from ``compiled_autograd/report/``. Nothing here imports torch.
"""
