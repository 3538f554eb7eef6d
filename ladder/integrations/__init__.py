"""Plug-ins for other people's engines. The torch operators live in `ladder.runtime.operator`.

They sit that low because `ladder.api` calls them; this folder may import everything below the CLI.
"""
