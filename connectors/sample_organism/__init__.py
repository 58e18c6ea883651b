"""The listeners of `conf/organism.yaml`: a calculator, a search pair, a researcher; one notes each start."""
