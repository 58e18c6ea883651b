// Shows the OpenAPI document of the gateway that served this page. A token stays in the memory of the page.
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#api",
  deepLinking: true,
  docExpansion: "list",
  persistAuthorization: false,
  validatorUrl: null,
});
