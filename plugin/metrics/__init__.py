"""From the parts' counters to ``/metrics``: a report of the worker, a relay in the engine core, a
board in the frontend. Parts say in rows what they count; nothing here knows any of them."""
