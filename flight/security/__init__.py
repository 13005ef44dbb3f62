"""Who may reach the bus and what they may do there: principals and rights, the guard of a server, keys on disk.

It decides about calls, never about rows. A server without a guard lets everybody in and is for loopback only.
"""
