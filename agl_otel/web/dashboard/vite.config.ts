import react from "@vitejs/plugin-react";
import { defineConfig } from "vite";

// The service (agl_otel/web/static.py) serves what is built here, with a policy that allows nothing but files of its own:
// so no data: URLs of scripts and styles, and no script in the page itself.
export default defineConfig({
  plugins: [react()],
  build: { outDir: "../static", emptyOutDir: true, assetsInlineLimit: 0, modulePreload: { polyfill: false } },
  server: { proxy: { "/v1": "http://127.0.0.1:4748" } },
});
