"""The live view: the state of a gateway and its last minute, as JSON and as an event stream.

metric_samples.py copies the metrics, fleet_status.py the state; live_view.py and kv_flow.py compute
the view from two samples and a status; diagnosis.py writes its sentences, live_stream.py sends it.
"""
