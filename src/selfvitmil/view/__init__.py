"""The web viewer: slides with their maps in a browser, served on this machine or written as a folder to be mailed.

tiles.py     pictures: DeepZoom geometry, open slides, JPEG
index.py     which maps there are
study.py     a study under opaque ids, as plain data
files.py     the viewer's own files
app.py       addresses and answers
guard.py     who may ask, and the headers of every answer
server.py    socket, token, the running server
export.py    the same as a folder that needs no server
bundle.py    our modules as one script, for that folder
static/      page, modules and styles of the browser's half
"""

from __future__ import annotations
