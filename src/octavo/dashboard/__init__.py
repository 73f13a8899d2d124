"""The window onto a pool: frames as server-sent events, the page that shows them, and who may."""
