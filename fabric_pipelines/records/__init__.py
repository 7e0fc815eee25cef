"""Every value that crosses a process or disk boundary, with its Arrow schema: one module each.

Nothing here does I/O. A record says what it is, checks itself, and turns itself into Arrow or JSON and back.
"""
