"""One view among several gateways: what each has picked, booked, seen and charged, told to the others over a bus.

A gateway that hears nobody decides by what it knows itself: no request ever waits for the bus.
"""
