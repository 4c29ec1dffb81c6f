"""Tenants: how a request's tenant is found, what each may use, and on what terms."""
