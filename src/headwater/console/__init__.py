"""The page that a server shows to a browser: static files, which the wiring hands to the server."""
