import "@fontsource-variable/inter/wght.css";
import "@fontsource-variable/jetbrains-mono/wght.css";
import "./style.css";
import { QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { StrictMode } from "react";
import { createRoot } from "react-dom/client";
import { BrowserRouter } from "react-router";
import { ApiError } from "./api";
import { App } from "./app";
import { apply } from "./settings";

apply();
const client = new QueryClient({
  defaultOptions: {
    queries: {
      staleTime: 1000,
      retry: (count, error) => count < 2 && error instanceof ApiError && (error.status === 503 || error.status === 0),
      refetchOnWindowFocus: false,
    },
  },
});
createRoot(document.getElementById("root")!).render(
  <StrictMode>
    <QueryClientProvider client={client}>
      <BrowserRouter useTransitions={false}>{/* a filter is in the address: as a transition it would wait for whatever else is drawn */}
        <App />
      </BrowserRouter>
    </QueryClientProvider>
  </StrictMode>,
);
