"""The API process: proxies agents' chats to the engine, records them, and answers the driver.

It keeps no state that another process would need (INV-4). `app.build_app` is the composition root; nothing
connects at import.
"""
