"""A script for each client library, which needs nothing but that library:
`python tests/conformance/clients/with_NAME.py URL MODEL`.
"""
