"""HTTP: the Open Inference Protocol V2 over the `Backend` port; the only home of Starlette and uvicorn.

Names are imported from their modules, not from here: whoever needs `port` or `identity` must not pay for a server.
"""
