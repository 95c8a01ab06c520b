"""The live view: what a gateway does right now and did in the last minute, as one JSON value and as a stream of it.

gateway/admin/metric_samples.py notes the meters, gateway/admin/fleet_status.py how things stand, gateway/admin/live_view.py and gateway/admin/kv_flow.py make the value of two notes and of that,
gateway/admin/diagnosis.py the words, gateway/admin/live_stream.py tells who watches.
"""
