"""Engines behind one door (`door.py`), one file per engine, each loaded lazily."""
