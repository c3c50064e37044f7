"""The build tool: plan, compile, publish, inspect. Its command line is `sonata-aot`."""
