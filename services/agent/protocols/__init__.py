"""Forms of requests and answers that programs know: each file is one."""
