"""Generated protocol stubs; run `make protos` after changing a .proto file. Never edited by hand."""
