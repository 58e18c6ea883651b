"""The sample listeners of `conf/organism.yaml`: a calculator, a search pair, a researcher, and a start logger.

Must import only the XML pump's public modules: it shows how users write handlers.
"""
